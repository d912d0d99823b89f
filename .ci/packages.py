"""Build sdist and wheel, install the wheel in a fresh environment, and try it: python .ci/packages.py [--keep FOLDER].

The wheel is built from the sdist, so that what the sdist lacks is noticed. The fresh environment has nothing but the
wheel; torch and the other dependencies are those of the environment that runs this, because they are large.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = ("ghostclip/__init__.py", "ghostclip/ERRORS.md", "ghostclip/py.typed", "ghostclip/cli.py")
METADATA = ("License-Expression", "License-File", "Requires-Python", "Keywords", "Classifier", "Summary")
# Where the package came from, then what the README shows, as pasted.
ORIGIN = """
import importlib.metadata, ghostclip
assert ghostclip.__file__.startswith({prefix!r}), ghostclip.__file__
assert importlib.metadata.version("ghostclip") == ghostclip.__version__
"""


def readme_scripts() -> list[str]:
    """Give the README's blocks of Python, each a script of its own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program outside of the checkout, and give its output.

    Args:
        *command: Program and arguments.
        cwd: Where.

    Returns:
        What it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(folder: Path, *requirements: str | Path, options: tuple[str, ...] = ()) -> Path:
    """Make an environment with some packages.

    Args:
        folder: Where.
        *requirements: What is installed in it.
        options: Of pip.

    Returns:
        Its folder of programs.
    """
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    # The pip of this environment installs into the other one, which is quicker than making one there.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", programs / "python")
    run(*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", *options, *requirements, cwd=folder)
    return programs


def build(folder: Path) -> tuple[Path, Path]:
    """Build both packages.

    Args:
        folder: Where they go.

    Returns:
        The sdist and the wheel.
    """
    programs = environment(folder / "builder", "build", "hatchling")
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "dist"))
    run(programs / "python", "-m", "build", "--no-isolation", "--outdir", folder / "dist", checkout, cwd=folder)
    [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Refuse packages that lack something or hold what they should not.

    Args:
        sdist: The one.
        wheel: The other.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(archive.read(metadata))
    missing = [name for name in WANTED if name not in names] + [name for name in METADATA if said[name] is None]
    foreign = {name.split("/")[0] for name in names} - {"ghostclip", metadata.split("/")[0]}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing += [name for name in ("LICENSE", "README.md", "CHANGELOG.md", "tests/conftest.py") if name not in held]
    if missing or foreign:
        sys.exit(f"{wheel.name}, {sdist.name}: missing {missing}, not wanted {sorted(foreign)}")


def try_out(folder: Path, wheel: Path) -> list[str]:
    """Install the wheel where nothing else is, and use it.

    Args:
        folder: Where.
        wheel: The wheel.

    Returns:
        What it said.
    """
    programs = environment(folder / "user", wheel, options=("--no-deps",))
    packages = Path(
        run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    # Folders that a .pth file names come after the environment's own, and their own .pth files are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(programs / "python", "-c", ORIGIN.format(prefix=str(packages)), cwd=folder)
    return [
        run(programs / "ghostclip", "--version", cwd=folder),
        *(run(programs / "python", "-W", "ignore", "-c", script, cwd=folder) for script in readme_scripts()),
        run(
            programs / "ghostclip",
            "epsilon",
            "--noise-multiplier",
            "1",
            "--sample-rate",
            "0.1",
            "--steps",
            "9",
            cwd=folder,
        ),
    ]


def main() -> None:
    """Build, check and try."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy both packages there")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        check_contents(sdist, wheel)
        print(*(said.strip() for said in try_out(folder, wheel)), sep="\n")
        for package in (sdist, wheel):
            print(f"{package.name}: {package.stat().st_size / 1e3:.0f} KB")
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(package, keep)


if __name__ == "__main__":
    main()
