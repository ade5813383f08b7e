"""Ctrl-C at any moment and output that cannot be written end a command without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

COMMANDS = {
    "version": ("--version",),
    "help": ("bench", "--help"),
    "generate": ("generate", "Once upon a time"),
    "doctor": ("doctor", "--memory"),
    "bench": ("bench", "kv", "--repeats", "50"),
}
DELAYS_S = (0.02, 0.05, 0.1, 0.2, 0.4)
# Interrupts may be ignored where the tests run in the background. The command says when it has installed its first
# handler, so that delays count from there however slowly the interpreter starts on a busy machine.
INTERRUPTIBLE = """
import os, signal, sys
install = signal.signal
install(signal.SIGINT, signal.default_int_handler)
def install_and_tell(number, handler):
    before = install(number, handler)
    signal.signal = install
    os.write(ready, b".")
    return before
ready = int(sys.argv.pop(1))
signal.signal = install_and_tell
from outrider.cli.main import main
main()
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_a_command_quietly(command: str) -> None:
    for delay_s in DELAYS_S:
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, str(writer), *COMMANDS[command]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(writer,),
        )
        os.close(writer)
        with process:
            assert os.read(reader, 1) == b"."
            os.close(reader)
            time.sleep(delay_s)
            finished_before = process.poll() is not None
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate(timeout=120)
        assert len(complaint.splitlines()) <= 1, (delay_s, complaint.decode())
        # A command may have printed everything by then and be on its way out, whatever the clock says.
        done_in_time = (0,) if finished_before or command in ("version", "help") else ()
        assert process.returncode in (130, *done_in_time), delay_s


def test_ctrl_c_while_the_interpreter_shuts_down_keeps_the_status_of_the_command() -> None:
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from outrider.cli import app; app.run = lambda: None\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, process_id=os.getpid(), number=signal.SIGINT): kill(process_id, number)\n"
        "late = Late()\n"
        "from outrider.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_handler_is_installed_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys, outrider.cli.main\n"
        "assert not {'typing', 'numpy', 'torch', 'typer', 'rich', 'asyncio'} & set(sys.modules), sorted(sys.modules)"
    )
    # Without site-packages' own start-up hooks, which may import anything.
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})


def test_a_command_in_the_background_keeps_ignoring_interrupts() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv[1:] = ['--version']\n"
        "from outrider.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("arguments", [("--version",), ("serve", "--help"), ("sim", "--scenarios", "20", "--json")])
@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("failure", ["full", "closed"])
def test_output_that_cannot_be_written_is_one_line(arguments: tuple[str, ...], buffered: bool, failure: str) -> None:
    if failure == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "outrider", *arguments],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"},
        )
    finally:
        os.close(output)
    reason = "No space left on device" if failure == "full" else "Broken pipe"
    assert done.stderr.startswith(f"error: cannot write to standard output: {reason}; ")
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 1


def test_a_failure_that_only_shows_when_output_is_flushed_is_reported() -> None:
    code = (
        "import sys; from outrider.cli import app; app.app = lambda: sys.stdout.write('buffered')\n"
        "from outrider.cli.main import main; main()"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write to standard output: ")
    assert len(done.stderr.splitlines()) == 1
