"""A model's files: where they are, and what their headers say. Imports no torch: both processes read them."""
