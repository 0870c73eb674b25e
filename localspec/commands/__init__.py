"""What a person types: one module or folder per verb. No decoding logic."""
