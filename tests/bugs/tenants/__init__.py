"""A host with a user model of its own, and rules of its own that need a relation of it."""
