"""Finds the test files of the installed Transformers: its source distribution carries them, its wheel does not."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers
from filelock import FileLock

CACHE = Path(__file__).resolve().parents[2] / ".cache"


class SdistUnavailable(RuntimeError):
    """The source distribution is neither in the cache nor to be had from the package index."""


def fetch_tests_folder() -> Path:
    """Returns the folder of test files, downloading it the first time."""
    folder = CACHE / f"transformers-{transformers.__version__}" / "tests"
    CACHE.mkdir(exist_ok=True)
    # Several pytest workers collect this folder at once: the first one downloads, the others wait and find it there.
    with FileLock(CACHE / "transformers-sdist.lock"):
        if not folder.is_dir():
            # Unpacked beside its place and moved there whole, so that an interrupted run leaves nothing half-written.
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                unpacked = _unpack_tests(_download(Path(scratch)), Path(scratch))
                shutil.rmtree(folder.parent, ignore_errors=True)
                os.replace(unpacked, folder.parent)
    return folder


def _download(destination: Path) -> Path:
    # pip knows the index, the proxies and the certificates of this machine, and checks the archive's hash. Only
    # Transformers is asked for as source: pip prepares its metadata with setuptools, which may stay a wheel.
    requirement = f"transformers=={transformers.__version__}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--no-deps", "--no-binary", "transformers", "--dest", str(destination), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    archives = list(destination.glob("transformers-*.tar.gz"))
    if result.returncode or not archives:
        complaint = (result.stderr.strip().splitlines() or ["pip brought no archive"])[-1].removeprefix("ERROR: ")
        raise SdistUnavailable(f"The source distribution of {requirement} could not be downloaded ({complaint}).")
    return archives[0]


def _unpack_tests(archive: Path, destination: Path) -> Path:
    with tarfile.open(archive) as tar:
        # The archive has one top folder; the library's own source in it is 60 MB that nobody reads here.
        members = [m for m in tar.getmembers() if m.isfile() and m.name.split("/")[1] == "tests"]
        tar.extractall(destination, members, filter="data")
    unpacked = destination / archive.name.removesuffix(".tar.gz")
    # The repository has this empty file, the archive does not, and test_configuration_common.py opens it by its path.
    (unpacked / "tests" / "__init__.py").touch()
    return unpacked
