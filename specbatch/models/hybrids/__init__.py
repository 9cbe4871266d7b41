"""Hybrids: models of which some layers have a state in place of attention."""
