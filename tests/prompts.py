"""Prompts that break where text is parsed, split or escaped on its way."""

PROMPTS = [
    "<d>[English] Hi.</d>",
    "a cat, a dog",
    "true",
    "null",
    "${oops}",
    "???",
    """'single' and "double" \\ back""",
    "two\nlines\n",
    "tab\tand\r\nCRLF",
    "中文，日本語、한국어",
    "a fox 🦊👩‍👩‍👧",
    "   leading spaces",
    "key=value",
    "-dash",
]
