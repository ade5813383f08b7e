"""`python -m outrider`: the same as the command `outrider`."""

from outrider.api.cli.main import main

if __name__ == "__main__":
    main()
