"""Training loops of other libraries: what plugs into them. Each file needs the library that it is named after."""
