"""A service ends on a signal, at whatever instant that comes."""

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
before = [signal.getsignal(number) for number in STOPS]
for _ in range(ROUNDS):
    with redirect_stdout(Out()) as out:
        serve_until_stopped(Server)
    assert out.getvalue() == "listening on unix:/run/here\\n"
thread.join()
assert before == [signal.getsignal(number) for number in STOPS]
print(len(left))
"""


def test_a_signal_is_noticed_at_any_instant(programs: Programs) -> None:
    with programs.start(STOPPED) as process:
        out, _ = process.communicate(60.0)
    assert (process.returncode, out) == (0, "200\n")


IGNORING = """
import os, signal
from contextlib import redirect_stdout
from io import StringIO
from anabranch.transport.server.service import serve_until_stopped


class Server:
    endpoint = "unix:/run/here"

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


class Out(StringIO):
    def flush(self):
        handlers.append(signal.getsignal(signal.SIGHUP))
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)


handlers = []
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts it
with redirect_stdout(Out()):
    serve_until_stopped(Server)
print(handlers + [signal.getsignal(signal.SIGHUP)] == [signal.SIG_IGN, signal.SIG_IGN])
"""


def test_a_closed_terminal_ends_nothing_where_it_is_ignored(programs: Programs) -> None:
    with programs.start(IGNORING) as process:
        out, _ = process.communicate(60.0)
    assert (process.returncode, out) == (0, "True\n")
