"""Messages of nxdpp's logger, kept in a list."""

import logging


class KeptMessages(logging.Handler):
    """Keeps messages that have one of ``words``, or all messages without words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words
        self.texts: list[str] = []
        logging.getLogger("nxdpp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not self.words or any(word in text for word in self.words):
            self.texts.append(text)
