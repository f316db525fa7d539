"""From the words of a command line to the settings that are judged, where sglang itself is not installed too."""
