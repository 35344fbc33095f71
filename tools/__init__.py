"""What the project measures of itself."""
