"""Tools: into a prompt as schemas, out of a model's text as calls; and its reasoning."""
