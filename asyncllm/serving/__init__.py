"""Ways to reach an engine from outside its process; each needs the extra ``[server]``."""
