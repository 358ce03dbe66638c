"""Convolutions: direct, by channels of several groups, and as products."""
