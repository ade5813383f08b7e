"""The `outrider` command line: `main` is the entry point, and `app` joins the sub-commands, one module each."""
