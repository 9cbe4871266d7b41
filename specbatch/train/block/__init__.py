"""Block drafters that can be trained."""
