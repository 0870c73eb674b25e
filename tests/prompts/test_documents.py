"""PDF and Word documents as text: what they say, and those that are damaged or made to harm."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from localspec.commands.chat.chat import read_file
from localspec.errors import UsageError
from localspec.prompts import documents
from tests.support.documents import write_docx, write_pdf


def test_pages_and_paragraphs(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.PDF", ["The first page.", "", "The third."])
    assert read_file(tmp_path / "a.PDF").text == "The first page.\n\n\n\nThe third.\n"
    write_docx(tmp_path / "a.docx")
    assert read_file(tmp_path / "a.docx").text == (
        "# Dear reader\n\nThé text of it.\n\ncell 0 | cell 1\ncell 2 | cell 3\n"
    )


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    write_pdf(path, ["secret"], password="x")
    with pytest.raises(UsageError, match="locked with a password"):
        read_file(path)
    write_pdf(path, [""])
    with pytest.raises(UsageError, match="has no text; its pages may be pictures"):
        read_file(path)
    for data in (b"", b"%PDF-1.7\n", b"PK\x03\x04", bytes(1000)):
        for name in ("a.pdf", "a.docx"):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(UsageError, match=r"cannot be read: it is damaged, or no (PDF|DOCX) file"):
                read_file(tmp_path / name)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pdf"
    write_pdf(path, ["x" * 600_000, "y" * 600_000])
    with pytest.raises(UsageError, match=r"more than 1,048,576 characters"):
        read_file(path)
    with path.open("wb") as file:
        file.truncate(documents.MAX_BYTES + 1)
    with pytest.raises(UsageError, match="more than 32 MiB"):
        read_file(path)
    write_docx(tmp_path / "a.docx")
    with zipfile.ZipFile(tmp_path / "a.docx", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/bomb.xml", bytes(65 << 20))
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path / "a.docx")
    monkeypatch.setattr(documents, "SECONDS", 0.01)
    with pytest.raises(UsageError, match="takes longer than"):
        read_file(path.with_suffix(".docx"))
