"""The keys of base.yml and their checks."""
