"""Lists of the samples of a source: a store, a folder, a text file that lists them, or a URL."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
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

# Names of the packs of any store.
PACKS = "samples-*-of-*.bin"
# Endings of text files that list samples.
_LISTING_ENDINGS = (".txt", ".tsv")
# Timeout of listing a URL, in seconds. A web server with millions of files takes minutes.
MAX_LISTING_SECONDS = 900.0
# Seconds between two reports of the progress of listing a URL.
_REPORT_SECONDS = 1.0

_Result = TypeVar("_Result")


def open_reader(
    source: str | Path,
    report_progress: ReportProgress | None = None,
    *,
    follow_links: bool = False,
    extensions: tuple[str, ...] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    """Return the reader of a store, a folder, a listing or a URL of a store or folder.

    The samples of a folder are all files in it and below it, hidden ones excepted. Links that stay
    within the folder are followed. A listing is a text file (.txt, .tsv) with one sample in each
    line: a path, or a key, a tab and a path. Relative paths start at the folder of the
    listing.

    Args:
        source: Path or URL to read.
        report_progress: Called repeatedly with a line about the progress.
        follow_links: True to follow links that lead out of a local folder, too. If False, `note` of
            the reader says how many links were left out.
        extensions: Endings of the keys of samples, in lower case; () if all files are samples.
        storage_options: Arguments of the file system behind a URL.

    Raises:
        ConfigError: If the source is none of these, or does not exist.
    """
    text = str(source)
    if is_url(text):
        opened = _open_url(text, report_progress, extensions, storage_options or {})
        if isinstance(opened, Reader):
            return opened
        # The URL is that of a path on this host, such as file:///data.
        text = opened
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        if (path / MANIFEST).exists():
            table = SampleTable.load(path / MANIFEST)
            if table.packs:
                return _open_packs(table, LocalFiles(keep_open=True), f"{path}/", extensions)
        return _open_folder(path, report_progress, follow_links, extensions)
    if path.suffix in _LISTING_ENDINGS and path.is_file():
        return _open_listing(path, report_progress, extensions)
    raise ConfigError(
        "source must be a folder, a store, a listing (.txt or .tsv) or a URL, got "
        f"{text!r}. "
        + (
            "Its ending is none of these."
            if path.is_file()
            else "Nothing is there: check the path."
        )
    )


def pack_names(packs: int, packs_id: str) -> list[str]:
    """Return the file names of a store's packs, whose number and id are in its table."""
    return [f"samples-{packs_id}-{pack:05d}-of-{packs:05d}.bin" for pack in range(packs)]


def is_url(source: str) -> bool:
    """Return True if a source is a URL, False if it is a path on this host."""
    return "://" in source


def _open_packs(
    table: SampleTable, files: Files, prefix: str, extensions: tuple[str, ...] = ()
) -> Reader:
    paths = [prefix + name for name in pack_names(table.packs, table.packs_id)]
    reader = Reader(table, files, paths, packed=True)
    if not extensions:
        return reader
    selected = [i for i in range(len(table)) if _is_selected(table.key(i), extensions)]
    _require_some(selected, extensions, prefix, len(table))
    return reader.select(np.array(selected, dtype=np.uint32))


def _is_selected(key: str, extensions: tuple[str, ...]) -> bool:
    return not extensions or key.lower().endswith(extensions)


def _require_some(
    selected: Sequence[Any], extensions: tuple[str, ...], source: object, total: int
) -> None:
    if total and not selected:
        raise ConfigError(
            f"extensions must be endings of samples in {source}, got {list(extensions)!r}, which "
            f"none of its {total} files has. `dlres store ls` lists them."
        )


def _open_folder(
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
        if _is_selected(key, extensions):
            keys.append(key)
        if report_progress:
            report_progress(f"{total} files listed")
    keys.sort()
    _require_some(keys, extensions, root, total)
    note = _left_out_note(root, left_out)
    if not keys:
        raise ConfigError(
            f"source must be a folder with files, got {root} without any. "
            f"{note or 'Put samples into it; hidden files do not count.'}"
        )
    _require_finished_store(keys, str(root))
    paths = [f"{root}/{key}" for key in keys]
    table = SampleTable.build(keys, _sizes(paths, report_progress))
    return Reader(table, LocalFiles(), paths, packed=False, note=note)


def _left_out_note(root: Path, left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    links = "1 link leads" if len(left_out) == 1 else f"{len(left_out)} links lead"
    return (
        f"{root}: {links} out of the folder and {'is' if len(left_out) == 1 else 'are'} left out, "
        f"such as {min(left_out)!r}. Pass follow_links=True (--follow-links) to follow them."
    )


def _files_below(root: Path, left_out: list[str] | None) -> Iterator[str]:
    """Yield the paths of the files below a folder, relative to it, in no order.

    Args:
        root: The folder.
        left_out: Gets the links that lead out of the folder; None to follow them.
    """
    real_root = os.path.join(os.path.realpath(root), "")
    # Folders to scan, each with the identities of itself and of the folders on the way to it. A
    # link to one of these is not followed, since the scan would never end.
    to_scan: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", (_identity(root.stat()),))]
    while to_scan:
        folder, ancestors = to_scan.pop()
        try:
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if (
                        left_out is not None
                        and entry.is_symlink()
                        and not _leads_into(entry.path, real_root)
                    ):
                        left_out.append(folder + entry.name)
                        continue
                    if not entry.is_dir():
                        yield folder + entry.name
                    elif (identity := _identity(entry.stat())) not in ancestors:
                        to_scan.append((f"{folder}{entry.name}/", (*ancestors, identity)))
        except OSError as error:
            fix = "Remove the link" if error.errno == errno.ELOOP else "Let this user read it"
            raise ConfigError(
                "source must be a folder that can be read, with all folders in it, got "
                f"{error.filename or root / folder}: {error.strerror}. {fix}."
            ) from error


def _leads_into(link: str, folder: str) -> bool:
    """Return True if a link leads to a folder or into it; `folder` is a real path with "/" at its
    end."""
    return os.path.join(os.path.realpath(link), "").startswith(folder)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _open_listing(
    listing: Path, report_progress: ReportProgress | None, extensions: tuple[str, ...]
) -> Reader:
    try:
        # "utf-8-sig": some text editors put a byte order mark first.
        text = listing.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"source must be a listing in UTF-8, one sample in each line, got {listing}: {error}. "
            "Write it again in UTF-8."
        ) from error
    keys, paths, total = [], [], 0
    for line_number, line in enumerate(_lines(text), 1):
        if line:
            if line.startswith("\t"):
                raise ConfigError(
                    f"Line {line_number} of a listing must have a key before its tab, got {line!r} "
                    f"in {listing}. Write a key, or the path alone."
                )
            if "\0" in line:
                raise ConfigError(
                    f"Lines of a listing must have no NUL character, got {line!r} in {listing}. "
                    "Write one path in each line."
                )
            total += 1
            key, tab, path = line.partition("\t")
            if _is_selected(key, extensions):
                keys.append(key)
                paths.append(str(listing.parent / (path if tab else key)))
    _require_some(keys, extensions, listing, total)
    table = SampleTable.build(keys, _sizes(paths, report_progress))
    return Reader(table, LocalFiles(), paths, packed=False)


def _lines(text: str) -> list[str]:
    """Return the lines of a text. Only a newline ends a line, because file names may have the other
    characters at which `str.splitlines` splits, even a carriage return."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if all(line.endswith("\r") for line in lines):
        # The listing was written on Windows; the carriage returns are no part of the names.
        lines = [line[:-1] for line in lines]
    return lines


def _require_finished_store(keys: Sequence[str], name: str) -> None:
    """Raise an error if a folder without a manifest has packs. Then it is an unfinished store,
    whose packs are no samples."""
    packs = [key for key in keys if fnmatch(key, PACKS)]
    if packs:
        raise ConfigError(
            f"source must be a whole store or a folder of samples, got {name} with {packs[0]} "
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
        status = os.stat(path)
    except OSError as error:
        if path.endswith("\r") and os.path.exists(path[:-1]):
            raise ConfigError(
                f"A sample must be a file, got {path!r}; only a file without the carriage return "
                "is there. End all lines of the listing with a newline alone."
            ) from error
        raise ConfigError(
            f"A sample must be a file that can be read, got {path}: {error.strerror}. Remove it "
            "from the source, or let this user read it."
        ) from error
    if not stat.S_ISREG(status.st_mode):
        # A read of a named pipe would wait until a process writes to it.
        raise ConfigError(
            f"A sample must be a regular file, got {path}, which is not. Remove it from the source."
        )
    return status.st_size


def _open_url(
    url: str,
    report_progress: ReportProgress | None,
    extensions: tuple[str, ...],
    options: Mapping[str, Any],
) -> Reader | str:
    """Return the reader of a URL; or a path, if the URL is that of a path on this host."""
    # Imported here because it takes a while, and only URLs need it.
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    def open_url() -> Reader | str:
        system, root = fsspec.core.url_to_fs(url, **options)
        if isinstance(system, LocalFileSystem):
            return str(root)
        files = UrlFiles(system, options)
        return files.call(lambda: _list_url(system, files, str(root), url, extensions))

    try:
        return _call_with_reports(open_url, f"listing {url}", report_progress)
    except DlresError:
        raise
    except Exception as error:  # a file system of fsspec may raise anything
        reason = str(error) or type(error).__name__
        text = (
            f"source must be a URL that fsspec can open, of a store or a folder, got {url}: "
            f"{hide_secrets(reason, options)}. Check it with `dlres store ls`."
        )
        # With options the cause is dropped: its text in a traceback may show a secret.
        raise ConfigError(text) from (None if options else error)


def _list_url(
    system: Any, files: UrlFiles, root: str, url: str, extensions: tuple[str, ...]
) -> Reader:
    """Return the reader of the store or folder behind a URL."""
    prefix = root.rstrip("/") + "/"
    if system.exists(prefix + MANIFEST):
        data = np.frombuffer(system.cat_file(prefix + MANIFEST), dtype=np.uint8)
        return _open_packs(SampleTable.from_bytes(data, url), files, prefix, extensions)
    files_by_key = _files_by_key(system, root, prefix)
    keys = sorted(key for key in files_by_key if _is_selected(key, extensions))
    _require_some(keys, extensions, url, len(files_by_key))
    if not keys:
        # Some file systems show no files where they cannot connect, and tell it only here.
        with suppress(FileNotFoundError):
            system.ls(root, detail=False)
        raise ConfigError(f"source must be a URL with files, got {url} without any. Check the URL.")
    _require_finished_store(keys, url)
    paths, sizes = [files_by_key[key][0] for key in keys], [files_by_key[key][1] for key in keys]
    if None in sizes:
        # A web server's pages show no sizes, so request the size of each file.
        sizes = files.sizes(paths)
    if None in sizes:
        raise ConfigError(
            f"source must be on a server that gives sizes of files, got {url} without the size of "
            f"{keys[sizes.index(None)]!r}. Put the samples into a store, which knows their sizes."
        )
    table = SampleTable.build(keys, [int(size) for size in sizes if size is not None])
    return Reader(table, files, paths, packed=False)


def _files_by_key(system: Any, root: str, prefix: str) -> dict[str, tuple[str, int | None]]:
    """Return path and size of every file below a root, by key; size None if it is not known."""
    files_by_key: dict[str, tuple[str, int | None]] = {}
    web = is_web(system)
    for path, info in system.find(root, detail=True).items():
        key = path.removeprefix(prefix)
        # An object store may mark a folder by an object of the same name, with or without a slash
        # at the end.
        if info["type"] != "file" or path == root or path.endswith("/"):
            continue
        # Names that begin with a dot are hidden. On a web server's page, a link that begins with
        # "?" sorts the page and is no file.
        if "/." not in f"/{key}" and not (web and key.startswith("?")):
            files_by_key[_web_key(key) if web else key] = path, info.get("size")
    # A marker without a slash is an empty object with the name of a folder that has other files.
    folders = {key[:i] for key in files_by_key for i, letter in enumerate(key) if letter == "/"}
    markers = [key for key in folders if files_by_key.get(key, ("", None))[1] == 0]
    for key in markers:
        del files_by_key[key]
    return files_by_key


def _web_key(quoted: str) -> str:
    """Return the key of a link on a web page: the file name that the server has quoted."""
    try:
        key = unquote(quoted, errors="strict")
    except UnicodeDecodeError:
        return quoted
    # A quoted slash is part of a name and separates no folder: keep such a name quoted.
    return key if key.count("/") == quoted.count("/") else quoted


def _call_with_reports(
    call: Callable[[], _Result], name: str, report_progress: ReportProgress | None
) -> _Result:
    """Return the result of a call, and report its progress about once a second.

    Without reports, the processes that wait for the result would time out.

    Args:
        call: Function to call, in a thread.
        name: Name of the call, for reports and errors.
        report_progress: Called once a second.

    Raises:
        PeerTimeoutError: If the call takes longer than `MAX_LISTING_SECONDS`.
    """
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    # A daemon thread and no pool: a call that hangs must not keep the interpreter from ending.
    threading.Thread(target=run, name="dlres-listing", daemon=True).start()
    started = time.monotonic()
    while not wait([result], timeout=_REPORT_SECONDS).done:
        taken = time.monotonic() - started
        if taken > MAX_LISTING_SECONDS:
            raise PeerTimeoutError(
                f"{name}: no answer in {format_seconds(taken)}. Check the server, or "
                "write a store (`dlres store put`), which is opened by reading one file."
            )
        if report_progress:
            report_progress(f"{name} for {format_seconds(taken)}")
    return result.result()
