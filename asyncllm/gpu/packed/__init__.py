"""Packed weights in files: what a start computes and a later start maps."""
