// Package page serves the pages that sidecar and router show in a browser: their shared style and
// functions, and the headers that keep a page to its own files. No goroutines.
package page

import (
	"embed"
	"io/fs"
	"net/http"
	"strings"
	"time"
)

//go:embed files
var files embed.FS

// Handle serves a page at /, its script at /page/page.js, and what pages share. The page has no
// other script, and loads nothing from elsewhere.
func Handle(mux *http.ServeMux, html, script string) {
	shared, err := fs.Sub(files, "files")
	if err != nil {
		panic(err) // the name is a constant
	}
	mux.Handle("GET /{$}", guard(text("page.html", html)))
	mux.Handle("GET /page/page.js", guard(text("page.js", script)))
	mux.Handle("GET /page/", guard(http.StripPrefix("/page/", http.FileServerFS(shared))))
}

func text(name, content string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, name, time.Time{}, strings.NewReader(content))
	})
}

// guard keeps a page to its own files: what peers and engines named must not run in it.
func guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := w.Header()
		head.Set("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
		head.Set("X-Content-Type-Options", "nosniff")
		head.Set("Referrer-Policy", "no-referrer")
		head.Set("Cache-Control", "no-cache")
		h.ServeHTTP(w, r)
	})
}
