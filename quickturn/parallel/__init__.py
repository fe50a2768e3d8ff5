"""Placements on a mesh, and weights declared with them."""
