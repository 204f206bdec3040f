"""Finds the test files of an installed library: its source distribution carries them, its wheel does not."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

CACHE = Path(__file__).resolve().parents[1] / ".cache"


class SdistUnavailable(RuntimeError):
    """The source distribution is neither in the cache nor to be had from the package index."""


def fetch_tests_folder(package: str) -> Path:
    """Returns the folder of test files, downloading it the first time."""
    folder = CACHE / f"{package}-{version(package)}" / "tests"
    CACHE.mkdir(exist_ok=True)
    # Several pytest workers collect this folder at once: the first one downloads, the others wait and find it there.
    with FileLock(CACHE / f"{package}-sdist.lock"):
        if not folder.is_dir():
            # Unpacked beside its place and moved there whole, so that an interrupted run leaves nothing half-written.
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                unpacked = _unpack_tests(_download(package, Path(scratch)), Path(scratch))
                shutil.rmtree(folder.parent, ignore_errors=True)
                os.replace(unpacked, folder.parent)
    return folder


def _download(package: str, destination: Path) -> Path:
    # pip knows the index, the proxies and the certificates of this machine, and checks the archive's hash. Only
    # the library is asked for as source: pip prepares its metadata with setuptools, which may stay a wheel.
    requirement = f"{package}=={version(package)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--no-deps", "--no-binary", package, "--dest", str(destination), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    archives = list(destination.glob(f"{package}-*.tar.gz"))
    if result.returncode or not archives:
        complaint = (result.stderr.strip().splitlines() or ["pip brought no archive"])[-1].removeprefix("ERROR: ")
        raise SdistUnavailable(f"The source distribution of {requirement} could not be downloaded ({complaint}).")
    return archives[0]


def _unpack_tests(archive: Path, destination: Path) -> Path:
    with tarfile.open(archive) as tar:
        # The archive has one top folder; the library's own source in it, up to 60 MB, nobody reads here.
        members = [m for m in tar.getmembers() if m.isfile() and m.name.split("/")[1] == "tests"]
        tar.extractall(destination, members, filter="data")
    unpacked = destination / archive.name.removesuffix(".tar.gz")
    # Archives may leave out this empty file, which makes a package of the folder; some tests open it by its path.
    (unpacked / "tests" / "__init__.py").touch()
    return unpacked
