"Property tests are judged by what they find, not by how long the first example takes on a busy machine."
from hypothesis import settings

settings.register_profile("book", deadline=None)
settings.load_profile("book")
