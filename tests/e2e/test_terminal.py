"""What a person sees: help pages, progress on a terminal and elsewhere, Ctrl-C, completion."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.progress import Progress

from jobs.cli.app import app
from jobs.cli.progress import TerminalProgress
from tests.factories import write_config, write_inputs

ROOT = Path(__file__).parents[2]
COMMAND = typer.main.get_command(app)
STEPS = ("plan", "prepare", "score", "audit", "publish", "report")
COLOUR = re.compile(r"\x1b\[[0-9;]*[34][0-9](;[0-9;]*)?m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\")


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **changes}


def on_a_terminal(*args: str | Path, interrupt_at: str = "", **env: str) -> tuple[int, str]:
    """Exit code and everything that a terminal of 100 columns is sent."""
    ours, theirs = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "jobs", *map(str, args)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
                               env=environment(**env), start_new_session=True)  # fmt: skip
    os.close(theirs)
    sent, deadline = b"", time.monotonic() + 200
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                sent += os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
        if interrupt_at and interrupt_at in sent.decode(errors="replace"):
            os.killpg(process.pid, signal.SIGINT)  # as the terminal does for Ctrl-C
            interrupt_at = ""
    code = process.wait(30)
    os.close(ours)
    return code, sent.decode(errors="replace")


def slow_config(folder: Path, **changes) -> tuple[Path, dict[str, str]]:
    """A run of 40 users whose scoring takes long enough to be seen, and its environment."""
    (folder / "trouble").mkdir()
    (folder / "trouble/slow").write_text("0.5")
    write_inputs(folder)
    config = write_config(folder, engine__backend="tests.trouble:trouble_backend", **changes)
    return config, {"NIGHTSHELF_TEST_TROUBLE": str(folder / "trouble")}


def test_a_terminal_shows_each_step_and_a_bar(tmp_path):
    config, env = slow_config(tmp_path)
    code, sent = on_a_terminal("run", config, **env)
    assert code == 0
    assert COLOUR.search(sent)
    plain = CONTROL.sub("", sent)
    for step in STEPS:
        assert re.search(rf"✓ {step} +\d+\.\d s", plain), step
    assert re.search(r"✓ score +\d+\.\d s  40 users", plain)
    assert re.search(r"━ +\d+/40 users \S+ users/s \d:\d\d:\d\d ETA", plain)
    assert f"file://{tmp_path}/runs/" in sent  # the page can be clicked
    assert "\x1b[?25h" in sent.rpartition("\x1b[?25l")[2]  # the cursor is back


def test_a_step_that_fails_is_marked(tmp_path):
    write_inputs(tmp_path)
    task = {"k": 5, "generate": {"search": "beam", "width": 2}}
    config = write_config(tmp_path, audit={"min_exact_share": 1.0}, task=task)
    code, sent = on_a_terminal("run", config)
    plain = CONTROL.sub("", sent)
    assert code == 6
    assert "✓ score" in plain
    assert "✗ audit" in plain
    assert re.search(r"report: /\S+/report\.html", plain)  # whole, to be copied
    assert "publish  " not in plain


def test_a_note_is_no_markup():
    heard = io.StringIO()
    with TerminalProgress(Console(file=heard, force_terminal=True, width=40)) as progress:
        progress.step("plan")
        progress.note("[/no] [red]markup[/red] " + "x" * 60)
    assert "[/no] [red]markup[/red] " + "x" * 60 in CONTROL.sub("", heard.getvalue())


def test_an_interrupt_anywhere_in_the_display_ends_the_step(monkeypatch):
    """Ctrl-C lands where it likes: here in each call that draws, one after the other."""
    plain, calls = Progress.refresh, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return plain(self)

    monkeypatch.setattr(Progress, "refresh", interrupted)
    for at in range(1, 6):
        calls.clear()
        heard = io.StringIO()
        with (
            pytest.raises(KeyboardInterrupt),
            TerminalProgress(Console(file=heard, force_terminal=True)) as progress,
        ):
            progress.step("plan")
            progress.step("score")
            progress.start(40)
            progress.advance(3)
            raise KeyboardInterrupt
        assert "\x1b[?25h" in heard.getvalue().rpartition("\x1b[?25l")[2], at


def test_no_color_is_obeyed(tmp_path):
    write_inputs(tmp_path)
    code, sent = on_a_terminal("run", write_config(tmp_path), NO_COLOR="1")
    assert code == 0
    assert not COLOUR.search(sent)
    assert "✓ publish" in CONTROL.sub("", sent)
    code, sent = on_a_terminal("--help", NO_COLOR="1")
    assert code == 0
    assert not COLOUR.search(sent)


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"FORCE_COLOR": "1"}], ids=lambda e: min(e))
def test_what_cannot_redraw_gets_plain_lines(tmp_path, env):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    if "TERM" in env:
        _, sent = on_a_terminal("run", config, **env)
    else:  # the log of a job that asks for colours is no terminal
        command = [sys.executable, "-m", "jobs", "run", str(config)]
        done = subprocess.run(command, cwd=ROOT, env=environment(**env), capture_output=True)
        sent = done.stderr.decode()
    lines = [line.strip() for line in sent.splitlines()]
    assert [line for line in lines if line in STEPS] == list(STEPS)
    assert "\x1b[2K" not in sent
    assert "\x1b[?25l" not in sent


def test_ctrl_c_on_a_terminal_ends_with_130_and_a_word(tmp_path):
    config, env = slow_config(tmp_path, run__workers=1, run__shard_users=2)
    code, sent = on_a_terminal("run", config, interrupt_at="/40", **env)
    plain = CONTROL.sub("", sent)
    assert code == 130, plain
    assert "nightshelf: interrupted; run the same command again to continue" in plain
    assert "✗ score" in plain
    assert "Traceback" not in plain
    assert "\x1b[?25h" in sent.rpartition("\x1b[?25l")[2]


# --- help -----------------------------------------------------------------------------------------


def commands(group=COMMAND, before=()):
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name), command


def test_the_list_of_commands_fits_in_one_line_each_and_in_panels(nightshelf):
    page = nightshelf("--help").out
    for (name, *_), command in commands():
        (line,) = [row for row in page.splitlines() if re.match(rf"│ {name} ", row)] or [""]
        assert line.rstrip("│ ").endswith("."), f"{name}: its first sentence is too long"
        top = COMMAND.commands[name]
        assert top.rich_help_panel, name
        if name != "bench":
            assert top.rich_help_panel != "More", f"jobs/cli/app.py has no place for {name}"
        assert command.help
    for panel in ("Set up and check", "Run", "Look and judge", "Published tables"):
        assert f"─ {panel} ─" in page
    for code in ("0 published", "6 the audit refused", "130 interrupted"):
        assert code in re.sub(r"\s+", " ", page)


@pytest.mark.parametrize("words", [w for w, _ in commands()], ids=" ".join)
def test_a_help_page_names_no_type_of_a_flag(nightshelf, words):
    page = nightshelf(*words, "--help").out
    assert "Usage: nightshelf" in page
    assert "<bool>" not in page


def examples():
    for words, command in commands():
        for line in (command.epilog or "").splitlines()[1:]:
            yield pytest.param(words, line.strip(), id=line.strip())


@pytest.mark.parametrize(("words", "line"), list(examples()))
def test_an_example_of_a_help_page_parses(words, line):
    first, *rest = shlex.split(line, comments=True)
    assert first == "nightshelf"
    assert rest[: len(words)] == list(words)
    rest = rest[len(words) : next((i for i, w in enumerate(rest) if w in (">", "|")), None)]
    dict(commands())[words].make_context(words[-1], rest)


# --- completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(shell):
    typed = {
        "bash": {"COMP_WORDS": "nightshelf rep", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "nightshelf rep"},
        "fish": {"_TYPER_COMPLETE_ARGS": "nightshelf rep", "_TYPER_COMPLETE_FISH_ACTION":
                 "get-args"},
    }[shell]  # fmt: skip
    code = "from jobs.cli.app import main; main()"
    env = environment(_NIGHTSHELF_COMPLETE=f"complete_{shell}", **typed)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "report" in done.stdout, done.stderr
    assert "publish" not in done.stdout


def test_the_script_for_a_shell_can_be_shown():
    code = "from jobs.cli.app import main; main()"
    env = environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    command = [sys.executable, "-c", code, "--show-completion", "bash"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "complete -o default -F" in done.stdout
    assert "nightshelf" in done.stdout
