"""A service ends on a signal, at whatever instant that comes, and not by another behind it."""

from __future__ import annotations

from programs import Programs

# A thread sends the signal as soon as the service listens, that is, while it begins to wait.
STOPPED = """
import os, signal, threading, time
from contextlib import redirect_stdout
from io import StringIO
from anabranch.transport.server.service import serve_until_stopped

ROUNDS = 200
STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
listens = threading.Semaphore(0)
left = []


class Server:
    endpoint = "unix:/run/here"

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        left.append(exception)


class Out(StringIO):
    def flush(self):
        listens.release()


def stop():
    for number in range(ROUNDS):
        listens.acquire()
        until = time.perf_counter() + number % 50 * 2e-6
        while time.perf_counter() < until:
            pass
        os.kill(os.getpid(), STOPS[number % 3])


thread = threading.Thread(target=stop)
thread.start()
for _ in range(ROUNDS):
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    with redirect_stdout(Out()) as out:
        serve_until_stopped(Server)
    assert out.getvalue() == "listening on unix:/run/here\\n"
    for number in STOPS:  # as the process ends
        os.kill(os.getpid(), number)
thread.join()
for number in STOPS:
    signal.signal(number, signal.SIG_DFL)
try:
    serve_until_stopped(lambda: 1 / 0)
except ZeroDivisionError:  # of one that was not served it is for the caller what ends the process
    assert {signal.getsignal(number) for number in STOPS} == {signal.SIG_DFL}
    print(len(left))
"""


def test_a_signal_is_noticed_at_any_instant(programs: Programs) -> None:
    with programs.start(STOPPED) as process:
        out, _ = process.communicate(60.0)
    assert (process.returncode, out) == (0, "200\n")


# A service whose clock goes on by ten seconds at each look whether its clients have gone.
LINGERS = """
import os, signal
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from anabranch.testing import FakeClock
from anabranch.transport import Deadline
from anabranch.transport.server import service

clock = FakeClock()
service.Deadline = SimpleNamespace(after=partial(Deadline.after, clock=clock))
service._GLANCE = 0.001


class Server:
    endpoint = "unix:/run/here"
    looks = saves = 0

    def __init__(self, at_look):
        self.at_look = at_look

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        print(self.looks, self.saves)

    def checkpoint(self):
        self.saves += 1

    def transport_statistics(self):
        self.looks += 1
        clock.advance(10.0)
        gone = self.looks == 2 and self.at_look()
        return SimpleNamespace(connections=0 if gone else 1)


@contextmanager
def signalled(server):
    os.kill(os.getpid(), signal.SIGTERM)
    yield


for at_look, linger in [
    (lambda: False, 25.0),
    (lambda: os.kill(os.getpid(), signal.SIGINT), 25.0),
    (lambda: True, 25.0),
    (lambda: False, 0.0),
]:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    service.serve_until_stopped(lambda: Server(at_look), signalled, linger=linger)
"""


def test_one_that_lingers_ends_after_its_time_at_the_next_signal_or_when_the_last_client_has_gone(
    programs: Programs,
) -> None:
    """At the third look 30 seconds are over."""
    with programs.start(LINGERS) as process:
        out, err = process.communicate(60.0)
    assert process.returncode == 0, err
    after_its_time, next_signal, last_gone, at_once = out.splitlines()[1::2]
    assert (after_its_time, next_signal, last_gone, at_once) == ("3 1", "2 1", "2 1", "0 0")
