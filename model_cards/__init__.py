"""The card that the Hub shows for a model: a template with our words, and what fills in its figures."""
