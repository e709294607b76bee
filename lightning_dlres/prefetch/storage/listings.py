"""Finding the samples of a source: of a store, a folder, a text file that lists them, or a URL."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np

from lightning_dlres.core.errors import ConfigError, DlresError, PeerTimeoutError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.prefetch.storage.base import ReportProgress
from lightning_dlres.prefetch.storage.manifest import MANIFEST, SampleTable
from lightning_dlres.prefetch.storage.readers import Files, LocalFiles, Reader
from lightning_dlres.prefetch.storage.source_options import hide_secrets
from lightning_dlres.prefetch.storage.url_files import UrlFiles, is_web

# What packs are called.
PACKS = "samples-*-of-*.bin"
_LISTINGS = (".txt", ".tsv")
# Millions of files of a web server take minutes to list.
LONGEST_LISTING = 900.0
_BEAT_SECONDS = 1.0

_Found = TypeVar("_Found")


def open_reader(
    source: str | Path,
    report_progress: ReportProgress | None = None,
    *,
    follow_links: bool = False,
    extensions: tuple[str, ...] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    """Return the reader of a store, a folder, a listing or a URL of a store or folder.

    A folder is all files in it and below it but for hidden ones, through links within it, too. A
    listing is a text file (.txt, .tsv) with one sample in each line: a path, or a key, a tab and a
    path; relative paths count from the listing.

    Args:
        source: what to read.
        report_progress: called now and then with what has been done.
        follow_links: whether links of a local folder are followed out of it, too; else `note` of
            the reader says how many were left out.
        extensions: endings of the keys of samples, in lower case; none: all files are samples.
        storage_options: arguments of the file system behind a URL.

    Raises:
        ConfigError: there is nothing of the kind.
    """
    text = str(source)
    if is_url(text):
        found = _open_url(text, report_progress, extensions, storage_options or {})
        if isinstance(found, Reader):
            return found
        text = found
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        if (path / MANIFEST).exists():
            table = SampleTable.load(path / MANIFEST)
            if table.packs:
                return _packed(table, LocalFiles(keep_open=True), f"{path}/", extensions)
        return _folder(path, report_progress, follow_links, extensions)
    if path.suffix in _LISTINGS and path.is_file():
        return _listing(path, report_progress, extensions)
    raise ConfigError(
        "A source must be a folder, a store, a listing (.txt or .tsv) or a URL, got "
        f"{text!r}. "
        + (
            "Its ending is none of these."
            if path.is_file()
            else "Nothing is there: check the path."
        )
    )


def pack_names(packs: int, packs_id: str) -> list[str]:
    """Return the names of a store's files, as its table counts and names them."""
    return [f"samples-{packs_id}-{pack:05d}-of-{packs:05d}.bin" for pack in range(packs)]


def is_url(source: str) -> bool:
    """Return whether a source is a URL, and no path of this machine."""
    return "://" in source


def _packed(
    table: SampleTable, files: Files, prefix: str, extensions: tuple[str, ...] = ()
) -> Reader:
    paths = [prefix + name for name in pack_names(table.packs, table.packs_id)]
    reader = Reader(table, files, paths, packed=True)
    if not extensions:
        return reader
    numbers = [number for number in range(len(table)) if _is_chosen(table.key(number), extensions)]
    _refuse_none(numbers, extensions, prefix, len(table))
    return reader.part(np.array(numbers, dtype=np.uint32))


def _is_chosen(key: str, extensions: tuple[str, ...]) -> bool:
    return not extensions or key.lower().endswith(extensions)


def _refuse_none(
    chosen: Sequence[Any], extensions: tuple[str, ...], source: object, total: int
) -> None:
    if total and not chosen:
        raise ConfigError(
            f"extensions must be endings of samples in {source}, got {list(extensions)!r}, which "
            f"none of its {total} files has. `dlres store ls` lists them."
        )


def _folder(
    root: Path,
    report_progress: ReportProgress | None,
    follow_links: bool,
    extensions: tuple[str, ...],
) -> Reader:
    keys: list[str] = []
    left_out: list[str] = []
    total = 0
    for key in _files_below(root, None if follow_links else left_out):
        total += 1
        if _is_chosen(key, extensions):
            keys.append(key)
        if report_progress:
            report_progress(f"{total} files listed")
    keys.sort()
    _refuse_none(keys, extensions, root, total)
    note = _note(root, left_out)
    if not keys:
        raise ConfigError(
            f"A source must have files, got the folder {root} with none. "
            f"{note or 'Hidden ones do not count: put samples into it.'}"
        )
    _refuse_unfinished(keys, str(root))
    paths = [f"{root}/{key}" for key in keys]
    table = SampleTable.build(keys, _sizes(paths, report_progress))
    return Reader(table, LocalFiles(), paths, packed=False, note=note)


def _note(root: Path, left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    links = "1 link leads" if len(left_out) == 1 else f"{len(left_out)} links lead"
    return (
        f"{root}: {links} out of the folder and {'is' if len(left_out) == 1 else 'are'} left out, "
        f"such as {min(left_out)!r}. Pass follow_links=True (--follow-links) to follow them."
    )


def _files_below(root: Path, left_out: list[str] | None) -> Iterator[str]:
    """Yield the paths of files from a folder on, in no order.

    Args:
        root: the folder.
        left_out: where links that lead out of it are put; None: they are followed.
    """
    inside_root = os.path.join(os.path.realpath(root), "")
    # Directories, each with the identities of itself and those that it was reached through: a link
    # to one of these would lead round for ever.
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", (_identity(root.stat()),))]
    while waiting:
        inside, above = waiting.pop()
        try:
            with os.scandir(root / inside) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if (
                        left_out is not None
                        and entry.is_symlink()
                        and not _leads_into(entry.path, inside_root)
                    ):
                        left_out.append(inside + entry.name)
                        continue
                    if not entry.is_dir():
                        yield inside + entry.name
                    elif (identity := _identity(entry.stat())) not in above:
                        waiting.append((f"{inside}{entry.name}/", (*above, identity)))
        except OSError as error:
            raise ConfigError(
                "A folder of samples must be readable, with all folders in it, got "
                f"{root / inside}: {error.strerror}. Let this user read it."
            ) from error


def _leads_into(link: str, folder: str) -> bool:
    """Return whether a link leads to a folder, whose real path ends with "/", or into it."""
    return os.path.join(os.path.realpath(link), "").startswith(folder)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _listing(
    listing: Path, report_progress: ReportProgress | None, extensions: tuple[str, ...]
) -> Reader:
    try:
        # A text editor may have put a byte order mark first.
        text = listing.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"A listing must be a text in UTF-8, one sample in each line, got {listing}: {error}. "
            "Write it again."
        ) from error
    keys, paths, total = [], [], 0
    for number, line in enumerate(_lines(text), 1):
        if line:
            if line.startswith("\t"):
                raise ConfigError(
                    f"Line {number} of a listing must have a key before its tab, got {line!r} in "
                    f"{listing}. Write a key, or the path alone."
                )
            if "\0" in line:
                raise ConfigError(
                    f"A listing must have no NUL character, got {line!r} in {listing}. Write it "
                    "as a text, one sample in each line."
                )
            total += 1
            key, tab, path = line.partition("\t")
            if _is_chosen(key, extensions):
                keys.append(key)
                paths.append(str(listing.parent / (path if tab else key)))
    _refuse_none(keys, extensions, listing, total)
    table = SampleTable.build(keys, _sizes(paths, report_progress))
    return Reader(table, LocalFiles(), paths, packed=False)


def _lines(text: str) -> list[str]:
    """Return the lines of a text. Only a newline ends one: names have all other characters that
    `str.splitlines` takes for the end of a line, even a carriage return."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if all(line.endswith("\r") for line in lines):
        # Written on Windows.
        lines = [line[:-1] for line in lines]
    return lines


def _refuse_unfinished(keys: Sequence[str], name: str) -> None:
    """Raise where a folder is a store without its manifest: its packs are no samples."""
    packs = [key for key in keys if fnmatch(key, PACKS)]
    if packs:
        raise ConfigError(
            f"A source must be a whole store or a folder of samples, got {name} with {packs[0]} "
            f"and no {MANIFEST}. Write it again with `dlres store put --overwrite`."
        )


def _sizes(paths: Iterable[str], report_progress: ReportProgress | None) -> list[int]:
    sizes: list[int] = []
    for path in paths:
        sizes.append(_size(path))
        if report_progress:
            report_progress(f"{len(sizes)} samples measured")
    return sizes


def _size(path: str) -> int:
    try:
        found = os.stat(path)
    except OSError as error:
        if path.endswith("\r") and os.path.exists(path[:-1]):
            raise ConfigError(
                f"A sample must be a file, got {path!r}, where there is only one without the "
                "carriage return. End all lines of the listing with a newline alone."
            ) from error
        raise ConfigError(
            f"A sample must be a file that can be read, got {path}: {error.strerror}. Remove it "
            "from the source, or let this user read it."
        ) from error
    if not stat.S_ISREG(found.st_mode):
        # To open a pipe waits for somebody who writes.
        raise ConfigError(
            f"A sample must be a file, got {path}, which is none. Remove it from the source."
        )
    return found.st_size


def _open_url(
    url: str,
    report_progress: ReportProgress | None,
    extensions: tuple[str, ...],
    options: Mapping[str, Any],
) -> Reader | str:
    """Return the reader of a URL, or the path that it means on this machine."""
    # Takes a while, and not everybody has a URL.
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    def look() -> Reader | str:
        system, root = fsspec.core.url_to_fs(url, **options)
        if isinstance(system, LocalFileSystem):
            return str(root)
        files = UrlFiles(system, options)
        return files.call(lambda: _look(system, files, str(root), url, extensions))

    try:
        return _in_time(look, f"listing {url}", report_progress)
    except DlresError:
        raise
    except Exception as error:  # whatever a file system of fsspec may raise
        reason = str(error) or type(error).__name__
        text = (
            f"A source must be a URL that fsspec can open, of a store or a folder, got {url}: "
            f"{hide_secrets(reason, options)}. Check it with `dlres store ls`."
        )
        # A traceback that shows the first error shows what it says.
        raise ConfigError(text) from (None if options else error)


def _look(system: Any, files: UrlFiles, root: str, url: str, extensions: tuple[str, ...]) -> Reader:
    prefix = root.rstrip("/") + "/"
    if system.exists(prefix + MANIFEST):
        data = np.frombuffer(system.cat_file(prefix + MANIFEST), dtype=np.uint8)
        return _packed(SampleTable.from_bytes(data, url), files, prefix, extensions)
    files_of = _files_of(system, root, prefix)
    keys = sorted(key for key in files_of if _is_chosen(key, extensions))
    _refuse_none(keys, extensions, url, len(files_of))
    if not keys:
        raise ConfigError(f"A source must have files, got {url} with none. Check the URL.")
    _refuse_unfinished(keys, url)
    paths, sizes = [files_of[key][0] for key in keys], [files_of[key][1] for key in keys]
    if None in sizes:
        # Web servers tell them one by one.
        sizes = files.sizes(paths)
    if None in sizes:
        raise ConfigError(
            f"A server must tell the sizes of files, got none of {keys[sizes.index(None)]!r} from "
            f"{url}. Put the samples into a store: it knows its sizes."
        )
    table = SampleTable.build(keys, [int(size) for size in sizes if size is not None])
    return Reader(table, files, paths, packed=False)


def _files_of(system: Any, root: str, prefix: str) -> dict[str, tuple[str, int | None]]:
    """Return path and size of every file below a root, by key."""
    files_of: dict[str, tuple[str, int | None]] = {}
    web = is_web(system)
    for path, info in system.find(root, detail=True).items():
        key = path.removeprefix(prefix)
        # An object store's marker of a folder has the folder's name, or that of the root.
        if info["type"] != "file" or path == root or path.endswith("/"):
            continue
        # A web server's page has links that sort it, which are no files.
        if "/." not in f"/{key}" and not (web and key.startswith("?")):
            files_of[_web_key(key) if web else key] = path, info.get("size")
    # A marker without its slash is an empty object beside those of the folder.
    folders = {key[:at] for key in files_of for at, letter in enumerate(key) if letter == "/"}
    markers = [key for key in folders if files_of.get(key, ("", None))[1] == 0]
    for key in markers:
        del files_of[key]
    return files_of


def _web_key(quoted: str) -> str:
    """Return the name that a web page's link stands for, so that keys are those of the folder."""
    try:
        key = unquote(quoted, errors="strict")
    except UnicodeDecodeError:
        return quoted
    # A quoted slash is part of a name, and ends no folder.
    return key if key.count("/") == quoted.count("/") else quoted


def _in_time(
    call: Callable[[], _Found], what: str, report_progress: ReportProgress | None
) -> _Found:
    """Return what a call returns that tells nothing of itself: tell that it goes on, and do not
    wait for ever."""
    found: Future[_Found] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    # One that hangs must not keep the interpreter from ending, as a pool's thread would.
    threading.Thread(target=run, name="dlres-listing", daemon=True).start()
    began = time.monotonic()
    while not wait([found], timeout=_BEAT_SECONDS).done:
        taken = time.monotonic() - began
        if taken > LONGEST_LISTING:
            raise PeerTimeoutError(
                f"{what}: no answer in {format_seconds(taken)}. Does the server still answer? A "
                "store (`dlres store put`) is opened by reading one file."
            )
        if report_progress:
            report_progress(f"{what} for {format_seconds(taken)}")
    return found.result()
