"""A checkpoint's files, read without torch: architecture, sizes, and the packages it needs."""
