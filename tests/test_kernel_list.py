"""The list of kernels is one: header, reference and compiled module agree."""

from __future__ import annotations

import re
from pathlib import Path

from commkern import reference

HEADERS = Path(__file__).parents[1] / "csrc" / "kernels"


def listed() -> dict[str, str]:
    """Kernel name -> argument struct, from the X macro, in its order."""
    text = (HEADERS / "kernel_table.h").read_text()
    macro = re.search(r"#define COMMKERN_KERNELS\(X\)(.*?[^\\])\n", text, re.DOTALL)
    assert macro, "kernel_table.h holds no COMMKERN_KERNELS(X)"
    return dict(re.findall(r"X\((\w+), (\w+)\)", macro.group(1)))


def visited(body: str) -> list[str]:
    """The members that a body of visit_fields visits, under their own names."""
    fields = re.findall(r'field\("(\w+)", \w\.(\w+)\)|(visit_format)\(', body)
    assert all(name == member for name, member, _ in fields), body
    return [name or "format" for name, _, _ in fields]


def fields_of_format() -> list[str]:
    text = (HEADERS.parent / "core" / "format.h").read_text()
    body = re.search(r"void visit_format\(.*?\{(.*?)\n\}", text, re.DOTALL)
    assert body, "format.h holds no visit_format"
    return visited(body.group(1))


def fields_of_structs() -> dict[str, list[str]]:
    """Argument struct -> the fields that visit_fields names, in order."""
    found = {}
    for header in HEADERS.glob("*.h"):
        text = header.read_text()
        for struct, body in re.findall(
            r"void visit_fields\((\w+)& a, .*?\{(.*?)\n\}", text, re.DOTALL
        ):
            members_visited = visited(body)
            members = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.DOTALL)
            assert members, f"{struct} is not in {header.name}"
            declared = re.findall(r"(\w+)(?: = [^;]+)?;", members.group(1))
            assert declared == members_visited, f"{struct}: members and visited fields"
            found[struct] = [
                field
                for member in members_visited
                for field in (fields_of_format() if member == "format" else [member])
            ]
    return found


def expected_signatures() -> dict[str, list[str]]:
    fields = fields_of_structs()
    return {name: fields[struct] for name, struct in listed().items()}


def test_the_header_lists_kernels() -> None:
    assert len(listed()) >= 13
    assert all(fields for fields in expected_signatures().values())


def test_reference_has_every_kernel() -> None:
    assert list(listed()) == reference.KERNELS
    signatures = reference.kernel_signatures()
    assert {name: list(fields) for name, fields in signatures.items()} == (
        expected_signatures()
    )


def test_reference_exports_every_kernel() -> None:
    assert set(reference.KERNELS) <= set(reference.__all__)
    for name in reference.KERNELS:
        assert getattr(reference, name).name == name


def test_compiled_module_has_every_kernel() -> None:
    from commkern import _core

    signatures = _core.kernel_signatures()
    assert list(signatures) == list(listed())
    assert {name: list(fields) for name, fields in signatures.items()} == (
        expected_signatures()
    )


def test_defaults_agree() -> None:
    from commkern import _core

    compiled = _core.kernel_signatures()
    for name, fields in reference.kernel_signatures().items():
        defaults = {field: default for field, (_, default) in compiled[name].items()}
        assert defaults == fields, name
