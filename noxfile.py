"""The tests on several versions of torch, each in an environment of its own.

    python -m pip install nox
    python -m nox                                 # the default tests on each version
    python -m nox -s "torch-2.6.0" -- -m long     # what stands behind -- goes to pytest

An environment takes some 5 GB where torch comes with CUDA. CI runs the version in constraints.txt
only; README says when the others were run last.
"""

import nox

nox.options.reuse_existing_virtualenvs = True

VERSIONS = ("2.6.0", "2.13.0", "2.14.1")


def _tests(version: str) -> None:
    @nox.session(name=f"torch-{version}")
    def tests(session: nox.Session) -> None:
        """Run the tests with one version of torch."""
        session.install(f"torch=={version}", "-e", ".[test]")
        session.run("python", "-m", "pytest", *session.posargs)


for each in VERSIONS:
    _tests(each)
