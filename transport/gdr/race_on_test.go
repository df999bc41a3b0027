//go:build race

package gdr

const meshNodes = 16
