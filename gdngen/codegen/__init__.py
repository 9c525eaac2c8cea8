"""Plan -> {file name: text}."""
