"""Data URIs: what is one, and what is refused."""

import base64

import pytest

from verax.errors import InvalidParameterError
from verax.serve.video.decode import read_data_uri


@pytest.mark.parametrize("kind", ["image/png", "video/mp4", "image/svg+xml", "application/octet-stream;name=a.png"])
def test_the_contents_come_back(kind):
    data = bytes(range(256))
    assert read_data_uri(f"data:{kind};base64,{base64.b64encode(data).decode()}", name="image") == data


@pytest.mark.parametrize(
    "uri",
    [
        *("http://169.254.169.254/", "https://example.com/a.png", "file:///etc/passwd", "/etc/passwd", ""),
        *("data:image/png,abc", "data:;base64,QUJD", "data:image/png;base64", "data:image/png;base64,QUJ", "data:"),
        *("data:image/png;base64,QU\nJD", "data:image/png;base64,§§§§", "data:" + "a" * 10_000 + "/png;base64,QUJD"),
    ],
)
def test_anything_else_is_refused(uri):
    with pytest.raises(InvalidParameterError, match=r"^image: "):
        read_data_uri(uri, name="image")
