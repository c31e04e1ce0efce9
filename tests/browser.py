"""Pages in a real browser, without a window; skipped if Chromium is not installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
)

needs_a_browser = pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium on this machine")


def seen(page: Path | str, folder: Path, after: str = "", *, size: str = "1400,900") -> str:
    """Return the document of a page after its script has run; fails if the script reported an error."""
    assert _CHROMIUM is not None
    address = page if isinstance(page, str) else f"file://{page}"
    flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={size}", "--dump-dom"]
    command = [_CHROMIUM, *flags, address + after]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert not re.findall(r"^.*CONSOLE.*$", found.stderr, re.MULTILINE)
    return found.stdout
