"""Documents where they lie: files, repositories, records and data sets of the Hub, on a disk or in an object store."""
