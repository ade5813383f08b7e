"""Entry point of the `outrider` command. Ctrl-C ends it with status 130 and without a traceback, at any moment.

Importing the commands takes most of a second, and an interrupt in the middle of an import cannot be handled by the
code that is being imported. This module therefore imports next to nothing before it installs its signal handler.
"""

import atexit
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED_EXIT_STATUS = 130
"""128 + SIGINT, the status that shells report for a command that Ctrl-C ended."""
SHOW_CURSOR = b"\x1b[?25h\r\n"


def main() -> None:
    """Runs the command line; the entry point of the `outrider` script and of `python -m outrider`."""
    # A command that was started in the background has interrupts ignored, and keeps ignoring them.
    listens = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if listens:
        signal.signal(signal.SIGINT, _exit_at_once)
        sys.unraisablehook = _unraisable
        # The callback that is registered first runs last. After it the interpreter would restore the default action,
        # by which a late Ctrl-C replaces the status of a command that has already ended.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from outrider.cli.app import run

    try:
        if listens:
            signal.signal(signal.SIGINT, _interrupt)
        run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED_EXIT_STATUS) from None
    finally:
        if listens:
            # The command has ended, and interrupting the interpreter's shutdown would only print tracebacks.
            signal.signal(signal.SIGINT, _exit_at_once)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    """Raises KeyboardInterrupt in the command, except in the middle of an import.

    Extension modules turn exceptions during their import into others, or print them; and before the imports are done,
    a command has nothing to clean up.
    """
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename == "<frozen importlib._bootstrap>":
            _exit_at_once(number, frame)
        caller = caller.f_back
    raise KeyboardInterrupt


def _exit_at_once(_number: int, _frame: "FrameType | None") -> None:
    if os.isatty(2):
        # A progress bar may have hidden it.
        os.write(2, SHOW_CURSOR)
    os._exit(INTERRUPTED_EXIT_STATUS)


def _unraisable(problem: "sys.UnraisableHookArgs") -> None:
    """Ends the process if Ctrl-C came during a destructor or a callback, where Python would print it and go on."""
    if issubclass(problem.exc_type, KeyboardInterrupt):
        _exit_at_once(signal.SIGINT, None)
    sys.__unraisablehook__(problem)
