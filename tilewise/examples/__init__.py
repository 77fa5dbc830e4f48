"""Programs that use tilewise, short enough to read in one sitting."""
