"""Tool calls: makes the tools' schemas for the prompt, and parses calls and reasoning."""
