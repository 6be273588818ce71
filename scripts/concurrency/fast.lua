local fast -- none: units are only held
