"""What tests of the command line share."""

import pytest

from newtention.cli.main import run


@pytest.fixture
def newtention(capsys):
    """Run a command line: (status, stdout, stderr)."""

    def call(*arguments):
        status = run([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert ("Traceback" in err) == (status == 1), err
        return status, out, err

    return call
