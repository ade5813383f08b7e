"""`python -m outrider` does the same as the command `outrider`."""

from outrider.cli.main import main

if __name__ == "__main__":
    main()
