"""The `outrider` command line: `main` holds the app, each sub-command has its own module."""
