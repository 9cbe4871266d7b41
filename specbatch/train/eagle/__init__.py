"""EAGLE-3 heads that can be trained."""
