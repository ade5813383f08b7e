"""What users touch: the command line, and with it everything that faces outwards."""
