"""Text in, token batches out: sources, tokenizer, the memory-mapped token file and the order of training windows."""

from quatrain.data.config import DataConfig
from quatrain.data.corpus import Corpus, prepare
from quatrain.data.tokens import TokenStream

__all__ = ["Corpus", "DataConfig", "TokenStream", "prepare"]
