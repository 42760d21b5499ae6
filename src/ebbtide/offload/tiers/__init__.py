"""Tiers: the places below host memory where chunks last. ``base`` says what one must do."""
