"""Unpacks parts of a wheel, each file checked against the wheel's own RECORD.

usage: unpack.py WHEEL FOLDER (FROM TO)...     a FROM with a slash at its end: all below it
prints `progress DONE TOTAL` and `file SIZE PATH`; exit code 3: the wheel is damaged,
4: the folder cannot be written, each with a line on stderr.
"""

import base64
import csv
import hashlib
import io
import os
import sys
import zipfile

CHUNK = 1 << 22


class Unwritable(Exception):
    pass


def recorded(archive):
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
    rows = csv.reader(io.StringIO(archive.read(name).decode()))
    return {row[0]: row[1] for row in rows}


def wanted(archive, parts):
    """Pairs of (entry, path in the folder)."""
    for start, to in parts:
        found = False
        for entry in archive.infolist():
            name = entry.filename
            if entry.is_dir():
                continue
            if start.endswith("/") and name.startswith(start):
                path = to + name[len(start):]
            elif name == start:
                path = to
            else:
                continue
            if ".." in path.split("/"):
                raise ValueError("a path leads out of the folder: " + name)
            found = True
            yield entry, path
        if not found:
            raise ValueError("it holds no " + start)


def copy(archive, entry, target, tick):
    """Returns the digest as a RECORD writes it."""
    digest = hashlib.sha256()
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        file = open(target, "xb")
    except OSError as error:
        raise Unwritable(str(error))
    with file, archive.open(entry) as source:
        while True:
            chunk = source.read(CHUNK)
            if not chunk:
                break
            digest.update(chunk)
            try:
                file.write(chunk)
                file.flush()
            except OSError as error:
                raise Unwritable(str(error))
            tick(len(chunk))
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def unpack(wheel, folder, parts):
    with zipfile.ZipFile(wheel) as archive:
        record = recorded(archive)
        entries = list(wanted(archive, parts))
        total = sum(entry.file_size for entry, _ in entries)
        done = 0

        def tick(size):
            nonlocal done
            done += size
            print("progress", done, total, flush=True)

        for entry, path in entries:
            found = copy(archive, entry, os.path.join(folder, path), tick)
            if found != record.get(entry.filename):
                raise ValueError(entry.filename + " is not what RECORD says")
            print("file", entry.file_size, path)
    if hasattr(os, "sync"):
        os.sync()  # on the disk before anyone renames the folder


def main():
    wheel, folder, *pairs = sys.argv[1:]
    try:
        unpack(wheel, folder, list(zip(pairs[::2], pairs[1::2])))
    except KeyboardInterrupt:
        return 130
    except Unwritable as error:
        print(error, file=sys.stderr)
        return 4
    except Exception as error:  # a damaged archive raises errors of a dozen types
        print(type(error).__name__ + ": " + str(error), file=sys.stderr)
        return 3
    return 0


sys.exit(main())
