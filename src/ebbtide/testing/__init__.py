"""Tools to test schedulers, tiers and policies with: a witness in place of a model, and its oracle."""
