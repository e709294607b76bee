"""Imports of the fork server, which take a process ten seconds."""

from __future__ import annotations

from benchmarks.support.capture.libraries import import_installed

import_installed()
