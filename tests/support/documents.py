"""PDF and Word files with known text."""

from __future__ import annotations

from pathlib import Path

import docx
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject


def write_pdf(path: Path, pages: list[str], password: str | None = None) -> None:
    """A PDF of one line a page."""
    writer = PdfWriter()
    font = DictionaryObject({
        NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"),
        NameObject("/BaseFont"): NameObject("/Helvetica"),
    })  # fmt: skip
    for text in pages:
        page = writer.add_blank_page(300, 300)
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(content)
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)


def write_docx(path: Path) -> None:
    """A heading, a paragraph, a table."""
    document = docx.Document()
    document.add_heading("Dear reader", 1)
    document.add_paragraph("Thé text of it.")
    table = document.add_table(2, 2)
    for n, cell in enumerate(cell for row in table.rows for cell in row.cells):
        cell.text = f"cell {n}"
    document.save(str(path))
