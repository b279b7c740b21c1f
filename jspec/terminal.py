"""What stands on the terminal: text, progress, figures, tables, errors. Knows no models."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from jspec.benchmark import OVERALL, PEER, PLAIN, Efficiency, Report, Row
from jspec.errors import JspecError
from jspec.metrics import Metrics

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended."""

_GRACE_SECONDS = 3.0
"""For cleaning up after Ctrl-C, before the process is ended."""

_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_BYTES_FROM = 1 << 20
"""A step counted in more units than this is counted in bytes."""
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def quiet_libraries() -> None:
    """Silences the libraries' logs and warnings; call before they are imported.

    What the user asks for (an environment variable already set, `python -W`) still stands.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.WARNING)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


@contextlib.contextmanager
def tidy_exit() -> Iterator[None]:
    """Turns a user's mistake, Ctrl-C and a closed pipe into one line (or none) and a status.

    Every other exception is a defect and keeps its trace.
    """
    try:
        yield
        with contextlib.suppress(ValueError, AttributeError):  # stdout closed, or none at all
            sys.stdout.flush()
    except JspecError as error:
        _fail(str(error))
    except BrokenPipeError:
        # What is still buffered has nowhere to go; without this the interpreter says so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _fail(message: str) -> None:
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise typer.Exit(EXIT_MISTAKE) from None


class _Amount(ProgressColumn):
    """`3/12`, or in bytes `120/270 MB 45 MB/s`, and the time left."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if not task.total:
            return Text("")
        left = "" if task.time_remaining is None else f" {_clock(task.time_remaining)} left"
        if task.total < _BYTES_FROM:
            return Text(f"{task.completed:.0f}/{task.total:.0f}{left}")
        rate = "" if task.speed is None else f" {task.speed / 1e6:.0f} MB/s"
        return Text(f"{task.completed / 1e6:.0f}/{task.total / 1e6:.0f} MB{rate}{left}")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Steps:
    """Progress bars of long steps, on a stderr that is a terminal; gone when all are done.

    `update` fits every `progress` argument of the library.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, label: str, done: int, total: int) -> None:
        """Shows `done` of `total` (0: unknown) for a step; the last one done clears the bars."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        if self._progress is None:
            if total and done >= total:
                return
            self._progress = self._start()
        known = total if total > 1 else None  # of a single thing there is no part
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=known)
        self._progress.update(self._tasks[label], completed=done, total=known)
        if total and done >= total:
            self._progress.remove_task(self._tasks.pop(label))
            if not self._tasks:
                self.close()

    def close(self) -> None:
        """Takes the bars down and gives the cursor back; text may be written after it."""
        progress, self._progress, self._tasks = self._progress, None, {}
        if progress is not None:
            progress.stop()

    def say(self, line: str) -> None:
        """Prints a line on stderr, above the bars if there are any."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _start(self) -> Progress:
        label = Column(max_width=28, no_wrap=True, overflow="ellipsis")
        progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=label),
            BarColumn(bar_width=16),
            _Amount(Column(no_wrap=True)),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        progress.start()
        return progress


@contextlib.contextmanager
def sure_interrupt(steps: Steps) -> Iterator[None]:
    """Makes Ctrl-C end the program soon and without a word, whatever libraries make of it.

    An import can swallow a KeyboardInterrupt, a compilation holds it back, and the threads of a
    reader print traces about it. So a thread hears of the signal as it comes, takes the bars
    down, closes stderr and ends the process if it has not cleaned up and ended by itself.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored (a background job), or somebody else's
        return
    happened, announced = threading.Event(), threading.Event()
    one_at_a_time = threading.RLock()  # a second signal may come in the middle of `announce`

    def announce() -> None:
        """Returns when it is done, whichever thread does it: no word after it reaches stderr."""
        with one_at_a_time:
            if not announced.is_set():
                announced.set()
                steps.close()
                print(file=sys.stderr, flush=True)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        happened.set()
        announce()
        raise KeyboardInterrupt

    def watch(signals: int) -> None:
        received = os.read(signals, 1)
        os.close(signals)
        if received:
            happened.set()
            announce()
            time.sleep(_GRACE_SECONDS)
            os._exit(EXIT_INTERRUPTED)

    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    threading.Thread(target=watch, args=(signals,), daemon=True).start()
    signal.signal(signal.SIGINT, raise_interrupt)
    previous = signal.set_wakeup_fd(wakeup)
    try:
        yield
    except BaseException:
        if not happened.is_set():
            raise
    finally:
        signal.set_wakeup_fd(previous)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(wakeup)
    if happened.is_set():
        raise KeyboardInterrupt


class TextOut:
    """Generated text on stdout as it comes; on a terminal without control characters."""

    def __init__(self) -> None:
        self._out, self._last = sys.stdout, "\n"
        self._controls = _CONTROLS if self._out.isatty() else {}

    def write(self, text: str) -> None:
        if text := text.translate(self._controls):
            self._out.write(text)
            self._out.flush()
            self._last = text[-1]

    def end(self) -> None:
        """Ends the text with a line break unless it has one."""
        if self._last != "\n":
            self.write("\n")


def tolerate_any_text() -> None:
    """Replaces what the encoding of stdout lacks, rather than fail in the middle of a text."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def figures_line(metrics: Metrics, drafter: str, width: int = 80) -> str:
    """What a generation cost and how well its drafts did, in one line of at most `width`."""
    head = f"{metrics.num_tokens} tokens, {metrics.tokens_per_second:.1f} tokens/s, "
    if not metrics.num_drafted:
        return head + "no drafts"
    kept = "kept unasked (lossy)" if metrics.num_lossy else "accepted"
    tail = (
        f": {metrics.acceptance_rate:.0%} {kept}, mean length {metrics.mean_acceptance_length:.2f}"
    )
    room = width - len(head) - len(tail)
    return head + (drafter if len(drafter) <= room else "..." + drafter[3 - room :]) + tail


def show_figures(line: str) -> None:
    """Dim under the text on a terminal; on stderr where stdout is a file or a pipe."""
    if sys.stdout.isatty():
        Console().print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    else:
        print(line, file=sys.stderr)


def print_report(report: Report) -> None:
    """Prints a table a comparison, at most 80 columns wide, with the efficiency under it."""
    console = Console()
    for name, rows in report.comparisons.items():
        console.print(report_table(report, name, rows))
        if name in report.efficiency:
            console.print(efficiency_lines(report.efficiency[name]), highlight=False)
    if report.stopped_by is not None:
        done = len({sample.prompt for sample in report.samples})
        console.print(f"not complete: stopped after {done} prompts", highlight=False)


def report_table(report: Report, name: str, rows: Sequence[Row]) -> Table:
    """A row a category, the overall row last."""
    against = PEER if name == PEER else "plain"
    mine = "plain" if name == PEER else "drafter"
    drafts = name not in (PEER, PLAIN)
    settings = report.settings
    K = settings.num_speculative_tokens
    what = f"drafter {name}" + (f", K = {K}" if K else "") if drafts else "plain decoding"
    title = f"{settings.model}, {settings.dtype}, {what}, tokens/s"
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("category", max_width=15, no_wrap=True, overflow="ellipsis")
    headings = [against, mine, "ratio", "median"]
    headings += ["accept", "length"] if drafts else []
    for heading in [*headings, "same text"]:
        grid.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.category == OVERALL:
            grid.add_section()
        cells = [
            f"{row.baseline_tokens_per_second:.1f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.median_speedup:.2f}x",
        ]
        if drafts:
            cells += [f"{row.acceptance_rate:.2f}", f"{row.mean_acceptance_length:.2f}"]
        grid.add_row(row.category, *cells, f"{row.num_same_text}/{row.num_prompts}")
    return grid


def efficiency_lines(value: Efficiency) -> str:
    """Efficiency and the times it comes from, in three lines."""
    return (
        f"engine efficiency {value.efficiency:.2f} of a possible {value.possible_speedup:.2f}x\n"
        f"  a round at {value.context_length} tokens: plain {1e3 * value.plain_seconds:.1f} ms, "
        f"verify {1e3 * value.verify_seconds:.1f} ms\n"
        f"  (in {value.wide_share:.0%} of the rounds), draft {1e3 * value.draft_seconds:.2f} ms\n"
    )
