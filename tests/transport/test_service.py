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
