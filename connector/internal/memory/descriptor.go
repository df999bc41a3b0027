package memory

import "golang.org/x/sys/unix"

// inode identifies the file behind a descriptor.
func inode(fd int) ([2]uint64, uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return [2]uint64{}, 0, err
	}
	return [2]uint64{uint64(st.Dev), st.Ino}, uint64(max(st.Size, 0)), nil
}
